"""Where bundles are brought to and fetched from: a machine over ssh, a directory, a file system of fsspec, the hub."""
