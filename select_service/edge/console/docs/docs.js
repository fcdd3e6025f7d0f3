// Shows /openapi.json with Swagger UI. Where the service asks for a token, the page asks its user, and
// keeps it as the console does: in this tab alone, and only in a header.

const KEY = "select-service-token";
const form = document.getElementById("ask");

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

let token = stored();
const bearer = () => (token ? { authorization: `Bearer ${token}` } : {});

// One server, its own, is not worth a choice; one <main> and no level of headings left out; a link
// within a button is for nobody who works without a mouse. The address follows what is opened.
const plain = ({ React: { createElement: h } }) => ({
  components: {
    DeepLink: ({ text }) => h("span", null, text),
    Page: ({ getComponent }) => {
      const part = (name) => h(getComponent(name, true));
      const assets = h(getComponent("SvgAssets"));
      const heading = h("h2", { className: "unseen" }, "Operations");
      const parts = ["InfoContainer", "AuthorizeBtnContainer", "errors"].map(part);
      const shown = h("div", { className: "wrapper" }, ...parts, heading, part("operations"), part("Models"));
      return h("div", { className: "swagger-ui" }, assets, shown);
    },
  },
});

// Answers are in tables, not in regions of a page, which would need a name each; a long example is
// scrolled by the keyboard, too.
function mend() {
  for (const table of document.querySelectorAll("table[role=region]")) table.removeAttribute("role");
  for (const example of document.querySelectorAll("pre.microlight:not([tabindex])")) example.tabIndex = 0;
}
new MutationObserver(mend).observe(document.getElementById("api"), { childList: true, subtree: true });

async function show() {
  const answer = await fetch("openapi.json", { headers: bearer() });
  form.hidden = answer.ok;
  if (!answer.ok) {
    document.getElementById("refused").textContent = token ? (await answer.json()).error : "";
    return;
  }
  globalThis.SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#api",
    plugins: [plain],
    layout: "Page",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    validatorUrl: null, // asks nobody else
    requestInterceptor: (request) => {
      Object.assign(request.headers, bearer());
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  token = document.getElementById("token").value.trim();
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    // then it holds until the page is closed
  }
  show();
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const shade = () => document.documentElement.classList.toggle("dark-mode", dark.matches); // of Swagger UI
dark.addEventListener("change", shade);
shade();
document.addEventListener("DOMContentLoaded", show);
