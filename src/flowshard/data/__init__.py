"""From metadata and media files to samples that are ready for the transformer."""
