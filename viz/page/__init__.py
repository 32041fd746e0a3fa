"""The interactive page: one HTML file with the ladder, its data, style and script."""
