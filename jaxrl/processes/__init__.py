"""What several processes of one run say to each other."""
