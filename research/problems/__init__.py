"""Problems of the verdicts: the embedded task drawn anew, and countdown."""
