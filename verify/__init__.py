"""The verifier: runs reference and candidates over one input and judges every stage."""
