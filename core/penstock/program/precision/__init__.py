"""Mixed precision: some operators of a Program compute in half precision, and the loss is scaled."""
