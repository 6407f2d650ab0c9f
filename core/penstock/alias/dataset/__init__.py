"""`paddle.dataset`: readers of the files in Fluid's cache, in Fluid's formats."""
