"""A thin decode loop over specdec_kernels: models, drafts, generation, command line."""
