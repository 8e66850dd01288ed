"""What a machine is and which backend suits it, found without importing a framework."""
