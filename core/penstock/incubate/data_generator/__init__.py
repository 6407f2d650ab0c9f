"""Fluid's import path of the data generators. Nothing is defined here: see `penstock.dataset.generator`."""

from penstock.dataset.generator import DataGenerator, MultiSlotDataGenerator, MultiSlotStringDataGenerator

__all__ = ["DataGenerator", "MultiSlotDataGenerator", "MultiSlotStringDataGenerator"]
