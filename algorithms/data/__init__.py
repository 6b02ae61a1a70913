"""From a JSONL file to batches: lines, rows, tokens with a mask, an order that can resume."""
