"""Episodes: the policy plays environments, and every token keeps where it came from."""
