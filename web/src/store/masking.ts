/** What stands in an answer in place of a value that its reader may not see; as in core/penstock/protocol/masking.py. */
export const MASK = "***";
