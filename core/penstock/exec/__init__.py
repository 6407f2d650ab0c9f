"""Running Programs: `Executor` one operator after another, `ParallelExecutor` as a graph in the native engine."""
