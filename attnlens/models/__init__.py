"""Access to models of the library `transformers`.

loading/ builds models from files, texts/ builds inputs from texts and media, hooks/ reads attention through
transformers' interface, trace/ reads attention that modules compute with their own code, and weights/ reads W_Q and W_K
of each head. kernel_transformers.py defines the models that `reproduce` trains.
"""
