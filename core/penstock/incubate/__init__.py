"""Fluid's import paths for fleet. Nothing is defined here: see `penstock.fleet`."""
