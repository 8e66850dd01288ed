"""What is trained, as data: adapters, their files and methods, base models, optimizers."""
