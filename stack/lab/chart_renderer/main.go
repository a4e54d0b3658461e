// Renders a Helm chart without subcharts as Helm's engine does: text/template, Sprig, and the functions that Helm adds
// (pkg/engine/engine.go, pkg/chart/common/util/coalesce.go). Prints the text of each template as JSON.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig/v3"
	"sigs.k8s.io/yaml"
)

// The linker writes the Debian version of Sprig here.
var version = "unknown"

type table = map[string]any

type files map[string]string

func (f files) Get(name string) string { return f[name] }

// Glob matches names as path.Match does; Helm's patterns also have ** and {a,b}.
func (f files) Glob(pattern string) files {
	found := files{}
	for name, text := range f {
		if ok, err := path.Match(pattern, name); err == nil && ok {
			found[name] = text
		}
	}
	return found
}

// coalesce returns the defaults with the user's values in them; a null of either takes the key away.
func coalesce(defaults, given table) table {
	made := table{}
	for key, value := range defaults {
		own, isGiven := given[key]
		inner, isTable := value.(table)
		ownInner, ownIsTable := own.(table)
		switch {
		case isGiven && own == nil, !isGiven && value == nil:
		case isTable && ownIsTable:
			made[key] = coalesce(inner, ownInner)
		case isTable && !isGiven:
			made[key] = coalesce(inner, table{})
		case isGiven:
			made[key] = own
		default:
			made[key] = value
		}
	}
	for key, value := range given {
		if _, known := defaults[key]; !known && value != nil {
			made[key] = value
		}
	}
	return made
}

func toYAML(value any) string {
	text, err := yaml.Marshal(value)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(text), "\n")
}

func toJSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return ""
	}
	return string(text)
}

func required(message string, value any) (any, error) {
	if text, ok := value.(string); value == nil || ok && text == "" {
		return value, errors.New(message)
	}
	return value, nil
}

// execute returns what a template prints, with nothing in place of values that are not there.
func execute(t *template.Template, name string, data any) (string, error) {
	var out strings.Builder
	err := t.ExecuteTemplate(&out, name, data)
	return strings.ReplaceAll(out.String(), "<no value>", ""), err
}

func functions(root *template.Template) template.FuncMap {
	made := sprig.TxtFuncMap()
	delete(made, "env")
	delete(made, "expandenv")
	made["toYaml"], made["toJson"], made["required"] = toYAML, toJSON, required
	made["fromYaml"] = func(text string) table {
		found := table{}
		if err := yaml.Unmarshal([]byte(text), &found); err != nil {
			found["Error"] = err.Error()
		}
		return found
	}
	made["include"] = func(name string, data any) (string, error) { return execute(root, name, data) }
	made["tpl"] = func(text string, data any) (string, error) {
		own, err := root.Clone()
		if err == nil {
			own.Funcs(template.FuncMap{"include": func(name string, data any) (string, error) { return execute(own, name, data) }})
			_, err = own.New("tpl").Parse(text)
		}
		if err != nil {
			return "", err
		}
		return execute(own, "tpl", data)
	}
	return made
}

// read returns the texts below a chart, by name.
func read(chart string) (files, error) {
	found := files{}
	err := filepath.WalkDir(chart, func(place string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(place)
		name, _ := filepath.Rel(chart, place)
		found[filepath.ToSlash(name)] = string(text)
		return err
	})
	return found, err
}

func render(chart, release, namespace string, given table) (map[string]string, error) {
	found, err := read(chart)
	if err != nil {
		return nil, err
	}
	about, defaults := table{}, table{}
	if err := errors.Join(yaml.Unmarshal([]byte(found["Chart.yaml"]), &about), yaml.Unmarshal([]byte(found["values.yaml"]), &defaults)); err != nil {
		return nil, err
	}
	titled := table{}
	for key, value := range about {
		titled[strings.ToUpper(key[:1])+key[1:]] = value
	}
	own := files{}
	var names []string
	for name, text := range found {
		if strings.HasPrefix(name, "templates/") {
			names = append(names, name)
		} else if name != "Chart.yaml" && name != "values.yaml" && name != "values.schema.json" {
			own[name] = text
		}
	}
	// deepest first, then by name from the last: the last definition of a name holds
	sort.Slice(names, func(a, b int) bool {
		if one, other := strings.Count(names[a], "/"), strings.Count(names[b], "/"); one != other {
			return one > other
		}
		return names[a] > names[b]
	})
	root := template.New("chart").Option("missingkey=zero")
	root.Funcs(functions(root))
	for _, name := range names {
		if _, err := root.New(name).Parse(found[name]); err != nil {
			return nil, err
		}
	}
	rendered := map[string]string{}
	for _, name := range names {
		if strings.HasPrefix(path.Base(name), "_") {
			continue
		}
		data := table{
			"Values": coalesce(defaults, given), "Chart": titled, "Files": own,
			"Release":  table{"Name": release, "Namespace": namespace, "Service": "Helm", "Revision": 1, "IsInstall": true, "IsUpgrade": false},
			"Template": table{"Name": name, "BasePath": "templates"},
		}
		if rendered[name], err = execute(root, name, data); err != nil {
			return nil, err
		}
	}
	return rendered, nil
}

func main() {
	log.SetFlags(0)
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("chart-renderer", version)
		return
	}
	if len(os.Args) != 4 {
		log.Fatal("usage: chart-renderer CHART RELEASE NAMESPACE < VALUES")
	}
	text, err := io.ReadAll(os.Stdin)
	given := table{}
	if err == nil {
		err = yaml.Unmarshal(text, &given)
	}
	if err != nil {
		log.Fatal(err)
	}
	rendered, err := render(os.Args[1], os.Args[2], os.Args[3], given)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(toJSON(rendered))
}
