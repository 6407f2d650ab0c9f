"""Files of PaddlePaddle Fluid 1.5 to 1.8: saved parameters and inference models, read and written."""
