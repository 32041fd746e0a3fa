"""stub"""


def vanishing_constants(graphs):
    return []
