"""What waits in host memory until the device needs it: layers of the base, and activations."""
