"""The conformance kit: judges any backend against the reference, op by op, and says which property fails.

`trueup check --backend NAME` and `pytest --pyargs trueup.conformance --trueup-backend NAME` are its two doors;
`docs/conformance.md` describes levels, properties and bounds.
"""
