"""What the layer does around the gated delta rule, as kernels, for packed rows. Letters as in `areno/kernels/delta`."""
