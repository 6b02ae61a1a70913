"""The optimizer step on one rank: log-probs, gradients, Adam, all summed over the whole layout."""
