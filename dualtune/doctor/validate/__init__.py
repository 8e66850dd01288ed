"""Proof that training works on a machine: five tiers, each a config with criteria that its run must meet."""
