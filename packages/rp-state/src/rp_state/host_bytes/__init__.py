"""What models take of host memory: by kind, held now, needed once they are trained."""
