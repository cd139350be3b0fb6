"""A CUDA device without a GPU, for tests: its driver (`driver`), its compiler (`build`), and the backend on it (`backend`)."""
