"""sinopia: a small CLIPSeg that finds what words name in the scenes that fresco paints."""
