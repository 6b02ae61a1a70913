"""Which of a padded vocabulary's columns are real."""


def real_columns(vocab_size: int, *, width: int, tp_rank: int) -> int:
    """How many of a rank's `width` logits belong to real tokens; they come first."""
    return min(max(vocab_size - width * tp_rank, 0), width)
