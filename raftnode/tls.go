package raftnode

import (
	"net/http"

	"github.com/snapferry/snapferry/raftnode/internal/peer"
)

// ConfigureServer sets up a server for a Node's Handler: HTTP/1.1 for snapshots and
// HTTP/2 for Raft's messages, with TLS if t is not nil.
func ConfigureServer(s *http.Server, t *TLS) error { return peer.ConfigureServer(s, t) }
