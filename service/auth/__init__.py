"""Who may call: API keys for people, one token per attempt for workers."""
