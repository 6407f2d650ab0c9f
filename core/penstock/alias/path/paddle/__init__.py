"""What `import paddle` finds where this folder is in PYTHONPATH, as in scripts of `penstock run-fluid`: the alias."""

from penstock.alias.finder import take_over

take_over()
