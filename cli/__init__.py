"""The `trueup` command."""


def main() -> None:
    """Entry point of the console script."""
    from trueup.cli.app import app

    app()
