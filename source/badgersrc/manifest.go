package badgersrc

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/dgraph-io/badger/v4/pb"
	"google.golang.org/protobuf/proto"
)

// The MANIFEST is a header and change sets, each behind its length and checksum.
const (
	manifestHeader = 8
	changesHeader  = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// cutManifest returns the longest beginning of a MANIFEST that names exactly the tables
// want. Badger appends a change before it is in force, and those of two compactions may
// come into force in either order: if no beginning fits, that is errMoved.
func cutManifest(data []byte, want map[uint64]bool) ([]byte, error) {
	if len(data) < manifestHeader || !bytes.HasPrefix(data, []byte("Bdgr")) {
		return nil, fmt.Errorf("the MANIFEST has another beginning than that of Badger v4")
	}
	named := map[uint64]bool{}
	missing, extra := len(want), 0
	end, at := 0, manifestHeader
	for {
		if missing == 0 && extra == 0 {
			end = at
		}
		set, next, err := changes(data, at)
		if err != nil {
			return nil, err
		}
		if set == nil {
			break
		}
		for _, c := range set.Changes {
			there := c.Op == pb.ManifestChange_CREATE
			if named[c.Id] == there {
				continue
			}
			named[c.Id] = there
			step := 1
			if !there {
				step = -1
			}
			if want[c.Id] {
				missing -= step
			} else {
				extra += step
			}
		}
		at = next
	}
	if end == 0 {
		return nil, errMoved
	}
	return data[:end], nil
}

// changes decodes the change set at an offset; nil is the end, which may be a set that is
// being written.
func changes(data []byte, at int) (set *pb.ManifestChangeSet, next int, err error) {
	rest := data[at:]
	if len(rest) < changesHeader {
		return nil, at, nil
	}
	length := int64(binary.BigEndian.Uint32(rest))
	if length > int64(len(rest)-changesHeader) {
		return nil, at, nil
	}
	body := rest[changesHeader : changesHeader+length]
	if crc32.Checksum(body, castagnoli) != binary.BigEndian.Uint32(rest[4:]) {
		if int(length) == len(rest)-changesHeader {
			return nil, at, nil
		}
		return nil, at, fmt.Errorf("the MANIFEST is damaged at byte %d", at)
	}
	set = &pb.ManifestChangeSet{}
	if err := proto.Unmarshal(body, set); err != nil {
		return nil, at, fmt.Errorf("the MANIFEST is damaged at byte %d: %w", at, err)
	}
	return set, at + changesHeader + int(length), nil
}
