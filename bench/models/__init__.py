"""The networks of the workloads: as torch modules (`modules`), and as Fluid programs for Penstock (`programs`)."""
