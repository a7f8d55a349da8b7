"""How much of an image a network looks at: Grad-CAM of test images, of a study's finished runs.

    measured = measure(*read_runs(Path("runs/quick")), ["none", "DropBlock2d"])
    write(measured, Path("runs/quick/saliency"))    # saliency.md, saliency.csv, saliency.png

Each map is that of the image's own class, whatever the network takes it for, so that all networks
are asked the same; two numbers say how far it spreads. Both stay as they are when a map is
multiplied by a number, since gradients of two networks have no common unit.

- Its entropy: the map divided by its sum is a distribution over the h w places of the layer; its
  entropy in nats, divided by log(h w), is 0 for one place, and 1 where all places count alike.
- The share of the image's objects that it touches: of their boxes, those in which the map, enlarged
  to the image, is on average at least `THRESHOLD` of its largest value. Where regions are cut from
  such maps, it is at this share (Zhou et al. 2016, "Learning deep features for discriminative
  localization", CVPR, section 3.2).

A map that is zero everywhere has neither: such maps are counted, and no part of the means.

`spread` has the two numbers, `measure` takes them of runs, `picture` draws, `report` writes.
"""
