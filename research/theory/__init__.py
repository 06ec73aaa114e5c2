"""The paper's theory on trees small enough to enumerate."""
