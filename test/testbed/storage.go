package testbed

import (
	"bytes"
	"context"
	"fmt"
)

// Volume is the GlusterFS volume that StorageNode serves. A node mounts it as
// type glusterfs from "storage:/v1".
const Volume = "v1"

// brickDir is where the volume's data is in the storage node: a folder of the
// machine's disk, so that it outlives the node's boots.
const brickDir = "/srv/brick"

// serveVolume makes the volume and waits until its data is served.
func (n *Node) serveVolume(ctx context.Context) error {
	brick := brickDir + "/" + Volume
	for _, argv := range [][]string{
		{"systemctl", "enable", "--now", "glusterd.service"},
		{"mkdir", "-p", brick},
		{"gluster", "--mode=script", "volume", "create", Volume, StorageNode + ":" + brick, "force"},
		{"gluster", "--mode=script", "volume", "start", Volume},
	} {
		if _, err := n.Exec(ctx, argv...); err != nil {
			return err
		}
	}
	err := poll(ctx, pollInterval, func() (bool, error) {
		res, err := n.Exec(ctx, "gluster", "--mode=script", "--xml", "volume", "status", Volume)
		return err == nil && bytes.Contains(res.Stdout, []byte("<status>1</status>")), nil
	})
	if err != nil {
		return fmt.Errorf("node %s: wait until volume %s is served: %w", n.name, Volume, err)
	}
	return nil
}
