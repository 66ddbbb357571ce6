"""Control plane: peak memory as a sum of terms."""
