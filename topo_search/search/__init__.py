"""The search: from path probabilities, a trace and measured step times to the tree that is fastest here."""
