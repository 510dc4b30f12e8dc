"""Run reference and candidates over the layers of an input and judge every stage."""
