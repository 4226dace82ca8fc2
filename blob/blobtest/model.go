package blobtest

import (
	"cmp"
	"slices"
	"strings"

	"github.com/snapferry/snapferry/blob"
)

// selectInfos is what a List must give, written the plain way.
func selectInfos(all map[string]blob.Info, prefix, startAfter string) []blob.Info {
	var infos []blob.Info
	for k, info := range all {
		if strings.HasPrefix(k, prefix) && k > startAfter {
			infos = append(infos, info)
		}
	}
	slices.SortFunc(infos, func(a, b blob.Info) int { return cmp.Compare(a.Key, b.Key) })
	return infos
}
