"""Fluid's import paths: the table of its names, the finder of `import paddle`, and modules that only they have."""
