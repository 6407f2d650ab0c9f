"""Files that a parameter server goes on from: its write-ahead log, and its snapshots."""
