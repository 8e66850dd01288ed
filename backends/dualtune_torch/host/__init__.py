"""What is in host memory: layers and activations that wait until the device needs them, weights to be written."""
