"""Where a bundle is pushed and pulled: a machine over ssh, a directory, a file system of fsspec, the hub."""
