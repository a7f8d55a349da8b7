"""Where `data` has its images from.

- `sources`: digits, canvas, CIFAR, folders of images, random ones; the fingerprint in a run's hash
- `canvas`: digits at random places among clutter, by split; `painting`: how one is made
- `images`: batches of them, augmented
- `corruption`: the occluded and the noisy test images
"""
