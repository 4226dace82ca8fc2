package source

// DirOptions adjusts Dir. Nil is valid.
type DirOptions struct {
	// Exclude lists globs of names to leave out. A glob is matched, by the rules of
	// path.Match, against the base name of an entry and against its whole path
	// relative to the store; one match is enough. "*" and "?" do not match "/", so
	// "*.tmp" leaves out such names at every depth, "log/*" what lies directly in
	// the top directory log, and "cache" every entry called cache. A directory that
	// matches is left out with all that is below it and is not opened. The root of
	// the store is never left out. A malformed glob fails Freeze.
	Exclude []string
}

// Dir returns the source of a directory, or of a single file, which then is the
// only entry under the base name of path. If path is a symbolic link it is resolved
// at Freeze; links below are recorded and not followed.
//
// A directory is not frozen by Freeze, which records the walk with identities
// (rule S2): a file that is written, replaced or removed later is found by comparing
// File.Identity with Entry.Identity, and by File.Check. A name that vanishes while
// the walk is made starts the walk again, three times in all.
func Dir(path string, opts *DirOptions) Source {
	d := &dir{path: path}
	if opts != nil {
		d.opts = *opts
	}
	return d
}

type dir struct {
	path string
	opts DirOptions
}
