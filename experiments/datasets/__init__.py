"""Where `data` has its images from.

- `sources`: digits, CIFAR, folders of images, random ones; the fingerprint in a run's hash
- `images`: batches of them, augmented
- `corruption`: the occluded and the noisy test images
"""
