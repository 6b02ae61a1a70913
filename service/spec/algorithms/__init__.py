"""The specs of the algorithms that come with Planish, a file each."""
