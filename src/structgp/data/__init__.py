"""Files and Python objects -> encoded sequences -> padded batches."""
