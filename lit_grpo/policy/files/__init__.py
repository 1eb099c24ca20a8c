"""Read and write the files of models, whole and in parts."""
