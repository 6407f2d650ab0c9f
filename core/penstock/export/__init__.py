"""What was recorded of a job in the files of other tools: traces, tables of operators, curves."""
