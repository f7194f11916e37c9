"""Small things that every room needs: types, errors, seeds, settings, files, progress, vector arithmetic."""
