"""Programs: plain-data recordings of torch calls. `ir`, `expr`, `text`, `legality` know no torch."""
